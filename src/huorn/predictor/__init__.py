"""The expert predictor: heads that say, when token t has been decoded, which experts each layer will use for token t+1."""
