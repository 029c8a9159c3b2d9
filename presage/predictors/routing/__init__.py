"""The parts of the router: what scores prompts, what makes the scores probabilities, when there is too little to say."""
