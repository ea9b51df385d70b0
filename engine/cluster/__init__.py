"""Several engines behind one address: the router, and an application under Ray Serve."""
