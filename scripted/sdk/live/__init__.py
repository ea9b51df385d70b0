"""Scripts on a real server of another engine, whose own loop waits for the script at its gate."""
