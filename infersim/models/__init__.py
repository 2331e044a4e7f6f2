"""Hugging Face config.json to layers, parameters and KV bytes per token."""
