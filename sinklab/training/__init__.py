"""How the models under study come to be: one loop, and a recipe for each kind of model."""
