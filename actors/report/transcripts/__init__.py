"""What the model wrote: reads a run folder, live, finished or killed."""
