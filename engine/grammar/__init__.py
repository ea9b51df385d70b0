"""Structured output: checks a grammar, and finds the tokens that it allows next.

Only this package imports the library (llguidance), and only with the first grammar. Masks are numpy arrays; compilation
is a separate module, because importing numpy takes longer than all other modules together.
"""
