"""Tool calls in the text of models: a parser for each family of models, and the choice among them."""
