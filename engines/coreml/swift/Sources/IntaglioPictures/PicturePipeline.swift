#if canImport(CoreML)
import CoreML
import Foundation
import PictureMath

/// What a picture is to be. Nil takes what the model's bundle says.
public struct PictureOptions {
    public var seed: UInt64 = 0
    public var height: Int?
    public var width: Int?
    public var steps: Int?
    /// Above 1 each step runs twice, with the prompt and with the negative one.
    public var guidance: Float?
    public var negativePrompt = ""
    /// Is told the steps that were made, and of how many.
    public var progress: ((Int, Int) -> Void)?

    public init() {}
}

/// Bytes `[height, width, 3]` of a picture.
public struct Picture {
    public let height: Int
    public let width: Int
    public let pixels: [UInt8]
}

/// Paints with the stages of a bundle that was compiled for Core ML. One stage is in memory at a time.
public final class PicturePipeline {
    private let settings: PictureSettings
    private let folder: URL
    private let computeUnits: MLComputeUnits
    private let tokenizer: PromptTokenizer

    /// `settings` is the `picture.json` that `intaglio compile` wrote; the stages lie where it says.
    public init(settings file: URL, computeUnits: MLComputeUnits = .all) throws {
        settings = try PictureSettings(contentsOf: file)
        folder = file.deletingLastPathComponent()
        self.computeUnits = computeUnits
        tokenizer = try PromptTokenizer(settings.prompt, beside: folder)
    }

    /// Paints a prompt. The noise is that of `intaglio run --rng mlx` with the same seed.
    public func paint(_ prompt: String, options: PictureOptions = PictureOptions()) async throws -> Picture {
        let run = try Run(settings, options)
        let prompts = run.isTwice ? [prompt, options.negativePrompt] : [prompt]
        let embeds = try await encode(prompts.map(tokenizer.encode), run)
        let latents = try await sample(embeds, run, options)
        return try await decode(latents, run)
    }

    private func load(_ stage: String, _ run: Run) async throws -> Stage {
        try await Stage(stage, of: settings, beside: folder, sizes: run.sizes, computeUnits: computeUnits)
    }

    private func encode(_ texts: [(ids: Tensor, mask: Tensor)], _ run: Run) async throws -> [Tensor] {
        let stage = try await load("text_encoder", run)
        var embeds: [Tensor] = []
        for text in texts {
            let feeds = ["input_ids": text.ids, "attention_mask": text.mask]
            embeds.append(try await stage.run(feeds, output: "prompt_embeds"))
        }
        return embeds
    }

    private func sample(_ embeds: [Tensor], _ run: Run, _ options: PictureOptions) async throws -> [Float] {
        let stage = try await load("transformer", run)
        let channels = settings.latents.channels
        let noise = Noise.normals(count: channels * run.tokens, seed: options.seed)
        var latents = Latents.pack(noise, channels: channels)
        var feeds = [
            "img_ids": Tensor(Latents.imageIds(height: run.rows, width: run.columns), [1, run.tokens, 4]),
            "txt_ids": Tensor(Latents.textIds(length: settings.prompt.length), [1, settings.prompt.length, 4]),
        ]
        if settings.sampling.embedded {
            feeds["guidance"] = Tensor([run.guidance], [1])
        }
        for step in 0..<run.steps {
            feeds["hidden_states"] = Tensor(latents, [1, run.tokens, channels])
            feeds["timestep"] = Tensor([FlowMatching.timestep(run.sigmas[step])], [1])
            var predictions: [[Float]] = []
            for conditioning in embeds {
                feeds["encoder_hidden_states"] = conditioning
                predictions.append(try await stage.run(feeds, output: "noise_pred").floats)
            }
            let velocity = run.isTwice
                ? FlowMatching.guided(predictions[0], negative: predictions[1], guidance: run.guidance)
                : predictions[0]
            latents = FlowMatching.step(latents, velocity: velocity, sigma: run.sigmas[step], next: run.sigmas[step + 1])
            options.progress?(step + 1, run.steps)
        }
        return latents
    }

    private func decode(_ latents: [Float], _ run: Run) async throws -> Picture {
        let stage = try await load("vae_decoder", run)
        let channels = settings.latents.channels
        let grid = Tensor(Latents.unpack(latents, channels: channels), [1, channels, run.rows, run.columns])
        let sample = try await stage.run(["latents": grid], output: "sample").floats
        return Picture(height: run.height, width: run.width, pixels: Latents.pixels(sample))
    }
}

/// Checked options, with what follows from them.
private struct Run {
    let height: Int
    let width: Int
    let rows: Int
    let columns: Int
    let steps: Int
    let guidance: Float
    let isTwice: Bool
    let sigmas: [Float]
    let sizes: [String: Int]

    var tokens: Int { rows * columns }

    init(_ settings: PictureSettings, _ options: PictureOptions) throws {
        let (sampling, side) = (settings.sampling, settings.latents.pixels)
        height = options.height ?? settings.size.height
        width = options.width ?? settings.size.width
        guard height > 0, width > 0, height % side == 0, width % side == 0 else {
            throw PictureError("the picture is \(width) by \(height) pixels; expected multiples of \(side)")
        }
        steps = options.steps ?? sampling.steps
        guard (1...1000).contains(steps) else {
            throw PictureError("there are \(steps) steps; expected 1 to 1000")
        }
        guidance = options.guidance ?? sampling.guidance
        let least: Float = sampling.embedded ? 0 : 1
        guard guidance >= least, guidance <= sampling.most else {
            throw PictureError("guidance is \(guidance); this model heeds \(least) to \(sampling.most)")
        }
        isTwice = guidance > 1 && !sampling.embedded
        guard isTwice || options.negativePrompt.isEmpty else {
            throw PictureError("a negative prompt has no effect here; set guidance above 1, or leave it out")
        }
        rows = height / side
        columns = width / side
        sigmas = FlowMatching.sigmas(steps: steps, imageTokens: rows * columns, shift: sampling.shift)
        sizes = [
            "batch": 1, "text_tokens": settings.prompt.length, "image_tokens": rows * columns, "height": height,
            "width": width, "latent_height": rows, "latent_width": columns,
        ]
    }
}
#endif
