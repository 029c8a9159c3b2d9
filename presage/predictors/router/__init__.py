"""The parts of the router: what scores prompts, what makes probabilities of it, and when there is too little to say."""
