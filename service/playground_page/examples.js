// Problems to begin with: each names only the fields that differ from those of an empty page.

export const EXAMPLES = [
  {
    name: "six-vectors",
    title: "Six vectors",
    about: "Six vectors attend to themselves, without projections and with scale 1: the first request of the README.",
    fields: {
      source: "tensors",
      query:
        "[[0.43, 0.15, 0.89],\n [0.55, 0.87, 0.66],\n [0.57, 0.85, 0.64],\n" +
        " [0.22, 0.58, 0.33],\n [0.77, 0.25, 0.10],\n [0.05, 0.80, 0.55]]",
      scale: "1",
    },
  },
  {
    name: "causal",
    title: "Causal, two heads",
    about: "Each token sees itself and what came before it; the two heads read different halves of the vectors.",
    fields: { source: "tokens", tokens: "the cat sat on the mat", heads: "2", causal: "true" },
  },
  {
    name: "cross",
    title: "Cross-attention",
    about: "Three queries look at five keys of another sequence.",
    fields: { source: "tokens", tokens: "le chat dort", memory_tokens: "the cat is fast asleep" },
  },
  {
    name: "gqa",
    title: "Shared key heads",
    about: "Grouped queries: four query heads, two key heads. Query heads 0 and 1 read key head 0, 2 and 3 key head 1.",
    fields: { source: "tokens", tokens: "many ask few answer", heads: "4", kv_heads: "2", causal: "true" },
  },
  {
    name: "padding",
    title: "Padding, an empty row",
    about: "The last key is padding, which nobody sees; the last query may attend nothing at all: its row is empty, and 0.",
    fields: {
      source: "tokens",
      tokens: "we met at noon [pad]",
      key_lengths: "[4]",
      allow_mask: "[[[[true],[true],[true],[true],[false]]]]",
    },
  },
  {
    name: "window",
    title: "Window",
    about: "Each token sees two keys before it and one behind.",
    fields: {
      source: "tokens",
      tokens: "a window slides along the sentence word by word",
      window_left: "2",
      window_right: "1",
    },
  },
  {
    name: "sinks",
    title: "Sinks",
    about: "A sink takes weight and gives no value: the rows of head 1, whose sink is larger, add up to less.",
    fields: { source: "tokens", tokens: "some weight goes nowhere", heads: "2", causal: "true", sinks: "[0, 2]" },
  },
];
