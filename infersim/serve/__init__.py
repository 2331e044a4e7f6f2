"""An OpenAI-compatible endpoint whose answers come when the simulated engine would give them."""
