"""Speed, measured the same way each time."""
