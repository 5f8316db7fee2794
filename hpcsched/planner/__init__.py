"""Answer what to buy: replays with other machines, and the memory of models. Pure."""
