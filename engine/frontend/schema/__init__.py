"""Bodies, replies and errors of the native protocol: types and the rules of single fields."""
