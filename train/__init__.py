"""The run: engine adapter, model, data, optimiser, checkpoint, loop, tracking, generation and reports."""
