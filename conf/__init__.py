"""The command line: Hydra configs and the code that reads them. Nothing else imports hydra or omegaconf."""
