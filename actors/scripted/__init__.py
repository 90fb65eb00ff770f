"""Parts that stand for a model: an engine that samples by a script, a trainer whose steps take a set time, and what test-beds need beside them."""
