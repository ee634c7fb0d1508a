"""All that reads jaxprs, JAX's records of programs."""
