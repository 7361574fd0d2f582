// Which layers a policy runs at each step, as far as a page can know it before the server has run anything.

/** `floor(start * layers)` for a start as it is written ("0.7"): exact, as the engine has it. */
export function firstLayer(start, layers) {
  const [whole, fraction = ""] = String(start).split(".");
  if (!/^\d+$/.test(whole) || !/^\d*$/.test(fraction)) return Math.floor(Number(start) * layers);
  return Number((BigInt(whole + fraction) * BigInt(layers)) / 10n ** BigInt(fraction.length));
}

/** The fewest layers that D3 ever runs; undefined for other policies. */
export function leastDepth({ policy, alpha, start, tail = 0 }, layers) {
  if (policy !== "d3") return undefined;
  return alpha === 1 ? layers : Math.min(layers, firstLayer(start, layers) + tail);
}

/** D3's layers at the steps 0 .. steps - 1: `max(floor(layers * alpha ** i), first + tail)`. */
export function d3Depths({ alpha, start, tail = 0 }, layers, steps) {
  const least = Math.min(layers, firstLayer(start, layers) + tail);
  return Array.from({ length: steps }, (_, i) => Math.max(Math.floor(layers * alpha ** i), least));
}

/** The layers at each step under a policy as the server describes it; null where only the server knows them. */
export function depthsOf(policy, layers, steps) {
  if (policy?.policy === "full") return Array(steps).fill(layers);
  if (policy?.policy === "d3") return d3Depths(policy, layers, steps);
  return null;
}

/** The lowest layer that is ever skipped. Where it is not known, the layers that ran are drawn from the bottom up. */
export function windowStart(policy, layers) {
  return policy?.policy === "d3" ? firstLayer(policy.start, layers) : null;
}

/** Whether a layer (0 is the lowest) runs at a step of this depth. */
export function runs(layer, depth, layers, first) {
  return first === null ? layer < depth : layer < first || layer >= first + layers - depth;
}

/** A policy in a few words. */
export function words(policy) {
  if (!policy) return "unknown";
  if (policy.policy === "full") return "full depth";
  const options = Object.entries(policy).filter(([name, value]) => {
    const isUsual = name === "policy" || (name === "tail" && value === 0) || name === "on_skip";
    return !isUsual && typeof value !== "object";
  });
  const name = policy.policy === "d3" ? "D3" : policy.policy;
  return [name, ...options.map(([option, value]) => `${option} ${value}`)].join(", ");
}
