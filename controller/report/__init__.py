"""What people and programs read of it: text and JSON. May see everything; nothing sees it."""
