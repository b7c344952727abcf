"""The nano model's weights: data only. ``drk.assistant.llm.nano_places`` finds the folder of this package."""
