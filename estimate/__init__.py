"""How much memory a model and its training take, found without taking any."""
