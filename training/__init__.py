"""Scripts that make seedling, the embedded default model: text, tokenizer, weights, predictor bank."""
