"""The link: frames, and what carries their bytes."""
