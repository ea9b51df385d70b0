"""Scripts on adapters of the SDK: the run that they drive, with its handles and its report."""
