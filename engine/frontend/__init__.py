"""The front end process: serves HTTP, turns tokens into text, and tracks one open request for each live rid."""
