import Foundation

/// Flow matching with Euler steps, as FLUX.2 samples. The arithmetic is that of `runtimes/flow_matching.py`.
public enum FlowMatching {
    /// The logarithm of the shift that FLUX.2 takes: a line over the tokens for 10 steps and one for 200, and between
    /// them linear in the steps.
    public static func empiricalMu(imageTokens: Int, steps: Int) -> Double {
        let at200 = 0.00016927 * Double(imageTokens) + 0.45666666
        if imageTokens > 4300 { return at200 }
        let at10 = 8.73809524e-05 * Double(imageTokens) + 1.89833333
        let slope = (at200 - at10) / 190
        return slope * Double(steps) + (at200 - 200 * slope)
    }

    /// The noise levels before each step and after the last, `steps + 1` of them from 1 to 0. `shift` nil takes the
    /// empirical one.
    public static func sigmas(steps: Int, imageTokens: Int, shift: Float?) -> [Float] {
        let mu = Float(empiricalMu(imageTokens: imageTokens, steps: steps))
        let factor = shift ?? Float(exp(Double(mu)))
        let last = 1 / Double(steps)
        let stride = steps > 1 ? (last - 1) / Double(steps - 1) : 0
        var levels: [Float] = []
        for step in 0..<steps {
            let even = Float(step > 0 && step == steps - 1 ? last : Double(step) * stride + 1)
            levels.append(factor / (factor + (1 / even - 1)))
        }
        return levels + [0]
    }

    /// What the denoiser takes at a noise level. Multiplied and divided, so that it rounds as elsewhere.
    public static func timestep(_ sigma: Float) -> Float { sigma * 1000 / 1000 }

    /// `latents + (next - sigma) * velocity`.
    public static func step(_ latents: [Float], velocity: [Float], sigma: Float, next: Float) -> [Float] {
        let width = next - sigma
        return zip(latents, velocity).map { latent, speed in
            let change = width * speed
            return latent + change
        }
    }

    /// The prediction led away from the negative one.
    public static func guided(_ prediction: [Float], negative: [Float], guidance: Float) -> [Float] {
        zip(prediction, negative).map { towards, away in
            let change = guidance * (towards - away)
            return away + change
        }
    }
}
