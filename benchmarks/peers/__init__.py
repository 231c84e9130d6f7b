"""Other libraries, measured beside Interlock: their cost, and what they do when something goes wrong."""
