"""Zero points and compensation sums of quantised convolutions."""
