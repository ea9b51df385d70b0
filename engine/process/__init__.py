"""What all processes of one server share: the pipe to the supervisor, the private folder, signals, the death report."""
