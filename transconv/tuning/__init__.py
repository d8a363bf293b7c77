"""Above the compiler and the proving ground: configs are tried, timed, and the best remembered."""
