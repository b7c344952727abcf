"""Part of drk."""
