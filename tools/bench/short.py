"""What a bench prints in its short form, by which tests see that it starts and ends."""

NO_RESULT = "short: these figures show that the bench starts, and nothing else"
