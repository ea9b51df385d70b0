"""A process in front of engines: places requests by the engines' cached prefixes, and forwards them over HTTP."""
