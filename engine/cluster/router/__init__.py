"""A process in front of engines: places requests by what the engines have cached, and passes them on over HTTP."""
