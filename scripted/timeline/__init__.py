"""The timeline: a run as one HTML page that explains itself, and as a Perfetto trace."""
