"""How a run starts: compose once, check, plan, make the run's directory, torchrun. `leantron = launch.cli:main`."""
