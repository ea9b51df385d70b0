"""Parts of every process of a server: the pipe to the supervisor, the private folder, signals, the death report."""
