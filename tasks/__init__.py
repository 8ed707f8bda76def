"""The stages of the compile pipeline: each a plain function from artifacts to one artifact."""
