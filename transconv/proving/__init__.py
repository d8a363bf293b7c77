"""The proving ground, above the compiler: data, answers, verdicts, and the processes they run in."""
