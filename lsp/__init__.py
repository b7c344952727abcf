"""The language server, which will show profiles and offer verified kernels in editors. Nothing is here yet."""
