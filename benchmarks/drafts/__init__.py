"""Parts of `speculation.py`: its texts, how they are followed, and what others make of them."""
