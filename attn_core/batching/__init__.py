"""Who rides together, and how several problems become one call of a kernel and come apart again."""
