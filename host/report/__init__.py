"""``make report``: every committed result as one self-contained page."""
