"""The doors: configs in, objects built, run folders out. Hydra and OmegaConf end here."""
