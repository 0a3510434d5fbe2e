"""Problems, answers, prompts, preference pairs and the data gate; no torch here."""
