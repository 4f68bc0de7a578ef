import Foundation

/// What `intaglio compile` wrote of a bundle, in `picture.json`. Paths are relative to that file.
public struct PictureSettings: Codable {
    /// The only version that this code reads.
    public static let version = 1

    /// A package and its functions; the first that has the sizes of a run is taken.
    public struct Stage: Codable {
        public let package: String
        public let functions: [Function]
    }

    /// One function of a package. `name` is nil where the package has only one.
    public struct Function: Codable {
        public let name: String?
        /// Named dims that are fixed, and those that may vary.
        public let sizes: [String: Int]
        public let dims: [String: Bounds]
        /// What the package calls the graph's inputs and outputs.
        public let inputs: [String: String]
        public let outputs: [String: String]

        /// Whether it runs with these sizes of named dims.
        public func allows(_ given: [String: Int]) -> Bool {
            sizes.allSatisfy { name, size in given[name] == nil || given[name] == size }
                && dims.allSatisfy { name, bounds in given[name].map(bounds.contains) ?? true }
        }
    }

    /// Least and greatest size of a dim.
    public struct Bounds: Codable {
        public let min: Int
        public let max: Int

        func contains(_ size: Int) -> Bool { min <= size && size <= max }
    }

    /// How a prompt becomes token ids: text around it, the file of the tokenizer, padding on the right to `length`.
    public struct Prompt: Codable {
        public let tokenizer: String
        public let kind: String
        public let unknown: String?
        public let before: String
        public let after: String
        public let length: Int
        public let pad: Int32
        public let probe: Probe
    }

    /// A prompt and the ids that it must have.
    public struct Probe: Codable {
        public let text: String
        public let ids: [Int]
    }

    /// Channels of a latent, and the pixels that it is wide and high.
    public struct Latents: Codable {
        public let channels: Int
        public let pixels: Int
    }

    /// Steps and guidance of a run that asks for none; a fixed shift of the noise levels, nil for the model's own; the
    /// largest guidance that the model heeds; whether it takes guidance as an input.
    public struct Sampling: Codable {
        public let steps: Int
        public let guidance: Float
        public let most: Float
        public let shift: Float?
        public let embedded: Bool
    }

    /// Pixels.
    public struct Size: Codable {
        public let height: Int
        public let width: Int
    }

    public let version: Int
    public let stages: [String: Stage]
    public let prompt: Prompt
    public let latents: Latents
    public let sampling: Sampling
    public let size: Size

    public init(contentsOf file: URL) throws {
        self = try JSONDecoder().decode(PictureSettings.self, from: Data(contentsOf: file))
        guard version == Self.version else {
            throw PictureError("\(file.path) is of version \(version), expected \(Self.version); compile the bundle again")
        }
    }
}

/// What went wrong, in words for whoever asked for a picture.
public struct PictureError: LocalizedError, CustomStringConvertible {
    public let description: String
    public var errorDescription: String? { description }

    public init(_ description: String) { self.description = description }
}
