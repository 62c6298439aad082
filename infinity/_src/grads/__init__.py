"""Gradients: from autograd to the update that reads them."""
