"""What conversations cost that come back: tokens computed, time to the first token, and who waits for whom."""
