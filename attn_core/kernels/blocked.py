"""The blocked kernel: everything but whole matrices of pairs, none of which is ever held."""
