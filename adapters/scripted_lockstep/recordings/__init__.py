"""What a server recorded: replayed in this process, and as a schedule."""
