"""Scripts on SDK adapters: the run that they drive, with its handles and its report."""
