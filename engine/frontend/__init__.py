"""The front end process: HTTP in and out, tokens to text, one open request for each live rid."""
