"""Answer what to buy: replay past jobs with other machines, and compute the memory that a model needs. Pure."""
