"""The language server: shows stored profiles in editors, and offers verified kernels there (``drk lsp``)."""
